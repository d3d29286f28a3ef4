"""The engines behind the server: the stages of a plan, and several copies of one."""
