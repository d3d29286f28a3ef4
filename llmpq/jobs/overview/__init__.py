"""Looking at jobs from outside, while they run or later: nothing is changed, no lock is taken."""
