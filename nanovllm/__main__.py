"""`python -m nanovllm`: the command line without its console script."""

from nanovllm.cli.main import main

raise SystemExit(main())
