"""The base of all HTTP servers: `app` (requests: limits, authentication, errors) and `server` (connections)."""
