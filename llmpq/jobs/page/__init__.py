"""The page of a job: one HTML file that needs only a browser."""
