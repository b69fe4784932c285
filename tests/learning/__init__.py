"""Whole runs that must learn; minutes long, so outside `make test`."""
