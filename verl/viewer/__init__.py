"""`verl view FOLDER…`: recorded runs in the browser."""
