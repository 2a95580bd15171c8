"""Names that users' code imports from here; the work lives elsewhere."""
