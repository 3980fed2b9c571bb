"""selftest: what is installed, what this machine and its engine can do, and how to get what is missing."""
