"""The stores. The packages above use only their contract."""
