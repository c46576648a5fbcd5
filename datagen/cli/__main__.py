"""`python -m datagen.cli`."""

from datagen.cli import main

main()
