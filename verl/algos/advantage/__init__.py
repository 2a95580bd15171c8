"""Advantage estimators, one per file; each file declares its name and traits."""
