# Table, queues and settings of a pool. The same resources as deploy/cloudformation.yml, with the same names.

data "aws_caller_identity" "current" {}
data "aws_partition" "current" {}
data "aws_region" "current" {}

locals {
  # Name of the table and of the launch template; prefix of queues, roles and functions.
  name        = "remuda-${var.pool}"
  tags        = merge(var.tags, { "remuda:pool" = var.pool })
  environment = var.github_environment != "" ? var.github_environment : var.pool

  has_functions = var.code != null

  # The broker needs the lists that the role of workflows trusts, too.
  all_settings = merge(local.settings, {
    REMUDA_REPOSITORIES = join(",", var.repositories)
    REMUDA_ENVIRONMENTS = join(",", var.environments)
  })
}

resource "aws_dynamodb_table" "this" {
  name         = local.name
  billing_mode = "PAY_PER_REQUEST"
  hash_key     = "pk"
  range_key    = "sk"

  dynamic "attribute" {
    for_each = ["pk", "sk", "gsi1pk", "gsi1sk", "gsi2pk", "gsi2sk", "gsi3pk"]

    content {
      name = attribute.value
      type = "S"
    }
  }

  # Version 6 of the provider also has key_schema; version 5 has only these two keys.
  global_secondary_index {
    name            = "live"
    hash_key        = "gsi1pk"
    range_key       = "gsi1sk"
    projection_type = "ALL"
  }

  global_secondary_index {
    name            = "by_provision"
    hash_key        = "gsi2pk"
    range_key       = "gsi2sk"
    projection_type = "ALL"
  }

  global_secondary_index {
    name            = "troubled"
    hash_key        = "gsi3pk"
    range_key       = "sk"
    projection_type = "ALL"
  }

  ttl {
    attribute_name = "ttl"
    enabled        = true
  }

  tags = local.tags
}

resource "aws_sqs_queue" "class" {
  for_each = toset(local.resource_classes)

  # The name of a pool contains no underscore, so no other pool has a queue of this name.
  name                       = "${local.name}_${each.key}"
  message_retention_seconds  = 345600
  visibility_timeout_seconds = 60
  delay_seconds              = 0
  receive_wait_time_seconds  = 0
  sqs_managed_sse_enabled    = true

  tags = local.tags
}

# The settings of the functions, one variable per line: Lambda limits the environment of a function to 4 KB.
resource "aws_ssm_parameter" "settings" {
  count = local.has_functions ? 1 : 0

  name        = "/remuda/${var.pool}/settings"
  description = "Settings of the functions, made from the variables of the module."
  type        = "String"
  # Up to 4 KB are free, up to 8 KB cost a few cents per month.
  tier  = "Intelligent-Tiering"
  value = join("\n", [for name, value in local.all_settings : "${name}=${value == null ? "" : value}"])
}
