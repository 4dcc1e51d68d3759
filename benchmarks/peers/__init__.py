"""Other libraries, in an environment of their own."""
