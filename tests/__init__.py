"""The tests of preftune; a package, so that helper processes can import `tests.support`."""
