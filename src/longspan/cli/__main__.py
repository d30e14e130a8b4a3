"""`python -m longspan.cli`."""

from longspan.cli import main

main()
