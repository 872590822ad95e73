"""From the study database to results, tables and terminal output. Imports no torch."""
