"""What is planned for, found in files: batches and jobs of prompts, their lengths, long rows."""
