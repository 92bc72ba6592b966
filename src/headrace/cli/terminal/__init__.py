"""What all commands share: how they print and fail, what their options may be, and what their exit codes say."""
