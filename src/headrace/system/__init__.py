"""What the process and the machine bring: interrupts, forks, torch's threads, and the rank's place in the world."""
