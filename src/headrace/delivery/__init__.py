"""What happens to a batch between the workers and the user."""
