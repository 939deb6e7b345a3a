"""The live view of a running router: its admin listener asked, its table formatted, and the terminal that shows it."""
