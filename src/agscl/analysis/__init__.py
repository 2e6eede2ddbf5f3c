"""What a finished run says about forgetting and learning."""
