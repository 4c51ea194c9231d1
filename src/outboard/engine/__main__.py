import sys

from outboard.engine.process import main

sys.exit(main())
