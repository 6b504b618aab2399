"""What is told to other people's services about runs and releases, where they are configured."""
