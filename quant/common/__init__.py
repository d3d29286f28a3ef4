"""What all packages share: errors, printable text, whole files, JSON settings."""
