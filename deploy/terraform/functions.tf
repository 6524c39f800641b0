# Functions: two commands on a schedule, and the broker. Each has its own role and log group.

locals {
  scheduled = {
    refresh = {
      enabled = true
      # Without an image, refresh leaves the stored configuration as it is.
      input     = var.ami != "" ? jsonencode({ command = "refresh" }) : jsonencode({ command = "refresh", sweep_only = true })
      variables = {}
    }
    scale-down = {
      enabled   = var.scale_down
      input     = jsonencode({ command = "scale-down" })
      variables = { ENVIRONMENT = local.environment }
    }
  }

  function_network = [for each in ["function-network"] : each if local.conditions[each]]

  all_functions = merge(
    {
      for name, command in local.scheduled : name => {
        description = "remuda ${name}"
        handler     = "remuda.aws_lambda.handler.handler"
        policies    = concat(name == "refresh" ? local.refresh : [name], ["${name}-function"], local.function_network)
        # CPU time grows with memory, and loading the models of the AWS libraries needs a full CPU.
        memory = 1024
        # Below the interval of the schedule, so that runs never overlap.
        timeout   = 240
        reserved  = var.reserve_concurrency ? 1 : -1
        variables = command.variables
      }
    },
    {
      broker = {
        description = "remuda provision and release for workflows"
        handler     = "remuda.aws_lambda.broker.handler"
        policies    = concat(local.provision, ["broker-function"], local.function_network)
        # One full CPU: somebody waits for each request.
        memory = 1769
        # Lambda's maximum: a provision may wait for new machines to boot.
        timeout   = 900
        reserved  = var.broker_concurrency == null ? -1 : var.broker_concurrency
        variables = {}
      }
    },
  )
  functions = { for name, function in local.all_functions : name => function if local.has_functions }
  schedules = { for name, command in local.scheduled : name => command if local.has_functions }

  attachments = flatten([
    for name, function in local.functions : [for policy in function.policies : { function = name, policy = policy }]
  ])

  is_app = var.github_app_id != ""
  variables = {
    REMUDA_BACKEND = "aws"
    REMUDA_POOL    = var.pool
    # The secret contains either a token or a private key; an empty variable counts as unset.
    REMUDA_GITHUB_TOKEN         = local.is_app ? "" : var.github_secret_arn
    REMUDA_GITHUB_APP_KEY       = local.is_app ? var.github_secret_arn : ""
    REMUDA_IAM_INSTANCE_PROFILE = aws_iam_instance_profile.agent.name
    REMUDA_SETTINGS_PARAMETER   = one(aws_ssm_parameter.settings[*].name)
  }
}

# Created here to set the retention: a group that Lambda creates never expires its events.
resource "aws_cloudwatch_log_group" "this" {
  for_each = local.all_functions

  name              = "/remuda/${var.pool}/${each.key}"
  retention_in_days = 30
}

resource "aws_iam_role" "function" {
  for_each = local.functions

  name                 = "${local.name}-${each.key}-function"
  path                 = var.role_path
  permissions_boundary = var.permissions_boundary == "" ? null : var.permissions_boundary
  tags                 = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy_attachment" "function" {
  for_each = { for each in local.attachments : "${each.function}/${each.policy}" => each }

  role       = aws_iam_role.function[each.value.function].name
  policy_arn = aws_iam_policy.this[each.value.policy].arn
}

resource "aws_lambda_function" "this" {
  for_each = local.functions

  function_name                  = "${local.name}-${each.key}"
  description                    = each.value.description
  role                           = aws_iam_role.function[each.key].arn
  handler                        = each.value.handler
  runtime                        = var.runtime
  architectures                  = [var.architecture]
  memory_size                    = each.value.memory
  timeout                        = each.value.timeout
  reserved_concurrent_executions = each.value.reserved

  filename         = var.code.filename
  source_code_hash = var.code.filename == null ? null : filebase64sha256(var.code.filename)
  s3_bucket        = var.code.s3_bucket
  s3_key           = var.code.s3_key

  dynamic "vpc_config" {
    for_each = length(var.function_subnet_ids) > 0 ? [var.function_subnet_ids] : []

    content {
      subnet_ids         = vpc_config.value
      security_group_ids = var.security_group_ids
    }
  }

  logging_config {
    log_format = "Text"
    log_group  = aws_cloudwatch_log_group.this[each.key].name
  }

  environment {
    variables = merge(local.variables, each.value.variables)
  }

  tags = local.tags

  # A function without its permissions fails in its first minutes.
  depends_on = [aws_iam_role_policy_attachment.function]
}

# No retries and no queue: the next scheduled event or the waiting workflow makes up for a failed one.
resource "aws_lambda_function_event_invoke_config" "this" {
  for_each = local.functions

  function_name                = aws_lambda_function.this[each.key].function_name
  qualifier                    = "$LATEST"
  maximum_retry_attempts       = 0
  maximum_event_age_in_seconds = 60
}

# Schedules -----------------------------------------------------------------------------------------------------------

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.schedules

  name                = "${local.name}-${each.key}"
  description         = "remuda ${each.key}, every five minutes"
  schedule_expression = "rate(5 minutes)"
  state               = each.value.enabled ? "ENABLED" : "DISABLED"
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = local.schedules

  rule      = aws_cloudwatch_event_rule.this[each.key].name
  target_id = each.key
  arn       = aws_lambda_function.this[each.key].arn
  input     = each.value.input

  retry_policy {
    maximum_retry_attempts       = 0
    maximum_event_age_in_seconds = 60
  }
}

resource "aws_lambda_permission" "schedule" {
  for_each = local.schedules

  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this[each.key].function_name
  principal     = "events.amazonaws.com"
  source_arn    = aws_cloudwatch_event_rule.this[each.key].arn
}

# Public URL of the broker --------------------------------------------------------------------------------------------

locals {
  has_function_url = local.has_functions && var.function_url
}

# Anyone may call it: the broker itself verifies the caller's token.
resource "aws_lambda_function_url" "broker" {
  count = local.has_function_url ? 1 : 0

  function_name      = aws_lambda_function.this["broker"].function_name
  authorization_type = "NONE"
}

# Since October 2025 a URL needs both permissions ("Control access to Lambda function URLs" in AWS' documentation).
resource "aws_lambda_permission" "url" {
  count = local.has_function_url ? 1 : 0

  action                 = "lambda:InvokeFunctionUrl"
  function_name          = aws_lambda_function.this["broker"].function_name
  principal              = "*"
  function_url_auth_type = "NONE"
}

resource "aws_lambda_permission" "url_invoke" {
  count = local.has_function_url ? 1 : 0

  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this["broker"].function_name
  principal     = "*"
  # Only through the URL: without it, anyone with an AWS account could invoke the function.
  invoked_via_function_url = true
}
