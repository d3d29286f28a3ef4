"""The sections of the page: each file prepares what one or several of them show."""
