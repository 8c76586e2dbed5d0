"""The object store: records in an S3 bucket."""
