"""The sandbox over HTTP: a server and a client around `verl.utils.sandbox`."""
