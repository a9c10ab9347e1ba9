"""`python -m online_sao` is the `online-sao` command."""

from online_sao.cli import main

main()
