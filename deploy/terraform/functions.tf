# Scheduled functions: each has its own role, log group and schedule.

locals {
  scheduled = {
    refresh = {
      enabled = true
      # Without an image, refresh leaves the stored configuration as it is.
      input     = var.ami != "" ? jsonencode({ command = "refresh" }) : jsonencode({ command = "refresh", sweep_only = true })
      variables = {}
      # A missing refresh is as bad as a failed one.
      missing_runs = "breaching"
    }
    scale-down = {
      enabled      = var.scale_down
      input        = jsonencode({ command = "scale-down" })
      variables    = { ENVIRONMENT = local.environment }
      missing_runs = "notBreaching"
    }
  }
  functions = { for name, function in local.scheduled : name => function if local.has_functions }

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
  for_each = local.scheduled

  name              = "/remuda/${var.pool}/${each.key}"
  retention_in_days = 30
}

resource "aws_iam_role" "function" {
  for_each = local.functions

  name = "${local.name}-${each.key}-function"
  tags = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "lambda.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

# The policy of the command, and that of its function: log and settings.
resource "aws_iam_role_policy_attachment" "function" {
  for_each = { for name in flatten([for each in keys(local.functions) : [each, "${each}-function"]]) : name => trimsuffix(name, "-function") }

  role       = aws_iam_role.function[each.value].name
  policy_arn = aws_iam_policy.this[each.key].arn
}

resource "aws_lambda_function" "this" {
  for_each = local.functions

  function_name = "${local.name}-${each.key}"
  description   = "remuda ${each.key}"
  role          = aws_iam_role.function[each.key].arn
  handler       = "remuda.aws_lambda.handler.handler"
  runtime       = var.runtime
  architectures = [var.architecture]
  # CPU time grows with memory, and loading the models of the AWS libraries needs a full CPU.
  memory_size = 1024
  # Below the interval of the schedule, so that runs never overlap.
  timeout                        = 240
  reserved_concurrent_executions = var.reserve_concurrency ? 1 : -1

  filename         = var.code.filename
  source_code_hash = var.code.filename == null ? null : filebase64sha256(var.code.filename)
  s3_bucket        = var.code.s3_bucket
  s3_key           = var.code.s3_key

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

# No retries and no queue: the next scheduled event makes up for a failed one.
resource "aws_lambda_function_event_invoke_config" "this" {
  for_each = local.functions

  function_name                = aws_lambda_function.this[each.key].function_name
  qualifier                    = "$LATEST"
  maximum_retry_attempts       = 0
  maximum_event_age_in_seconds = 60
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.functions

  name                = "${local.name}-${each.key}"
  description         = "remuda ${each.key}, every five minutes"
  schedule_expression = "rate(5 minutes)"
  state               = each.value.enabled ? "ENABLED" : "DISABLED"
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = local.functions

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
  for_each = local.functions

  action        = "lambda:InvokeFunction"
  function_name = aws_lambda_function.this[each.key].function_name
  principal     = "events.amazonaws.com"
  source_arn    = aws_cloudwatch_event_rule.this[each.key].arn
}
