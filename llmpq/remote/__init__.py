"""Ray from the outside: joining or starting it, its token, and jobs of its clusters."""
