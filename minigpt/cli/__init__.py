"""The command line: argparse and printing, a file a command. No module imports torch at its top."""
