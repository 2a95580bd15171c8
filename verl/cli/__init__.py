"""The command line `verl`: a table of subcommands (`main.py`) and the programs that exist only there."""
