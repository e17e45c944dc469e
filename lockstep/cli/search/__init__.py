"""The parts of `lockstep sweep`: what is asked, its runs, the processes that train them, what came out."""
