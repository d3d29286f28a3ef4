"""What this machine has of what llmpq needs: facts, what they mean, and the commands that mend."""
