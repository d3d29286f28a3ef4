"""Files of rows: JSON lines, CSV, Parquet, Ray Datasets, compressed or not."""
