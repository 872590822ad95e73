"""The shipped configuration files, packaged as `mosaic_opt.conf`."""
