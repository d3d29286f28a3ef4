"""Pictures of the report: fronts, the curve of a job, schedules."""
