"""Tests; a package, so that processes they start can import what `tests.support` holds."""
