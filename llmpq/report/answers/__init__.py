"""What a page says first: the verdict, the plans to choose from, how the plan is made again."""
