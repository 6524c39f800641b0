terraform {
  # Validations of variables refer to other variables.
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # The first version that can restrict the public permission of the broker to its URL.
      version = ">= 6.28, < 7.0"
    }
  }
}
