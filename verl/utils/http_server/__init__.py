"""What servers of ours share: uvicorn with limits, and the few words of ASGI that JSON over HTTP needs."""
