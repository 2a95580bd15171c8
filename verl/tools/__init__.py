"""Tools that models call: base classes and included tools."""
