"""ORCA's end-to-end experiments (section 6.2): iteration-level against request-level scheduling."""
