"""Headless Chromium for the tests, from the system's packages, without a network; and the dashboard it looks at."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
from selenium import webdriver

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@contextmanager
def chromium(folder, *, width=1280, dark=False):
    """A browser with a fresh profile and downloads in `folder`; the test is skipped where none is installed."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    profile = folder / f"profile-{width}-{dark}"
    for flag in (*FLAGS, OFFLINE, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.set_script_timeout(300)
    try:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield browser
    finally:
        browser.quit()


@contextmanager
def served(folder):
    """The address at which `mosaic dashboard` serves the database of a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mosaic_opt", "dashboard", f"port={port}", f"output={folder}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/studies", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


def errors(browser):
    """What the page has complained about so far."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
