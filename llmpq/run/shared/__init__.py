"""What runs of one plan share, in a session or one run alone: the checked model and its stages."""
