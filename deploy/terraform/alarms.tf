# Alarms, if there is a topic and the functions exist.

locals {
  has_alarms = local.has_functions && var.alarm_topic != null
  alarms = merge(
    {
      for name, function in aws_lambda_function.this : name => {
        description = name == "broker" ? "The broker crashes; its log contains the error." : "remuda ${name} fails; its log contains the error."
        namespace   = "AWS/Lambda"
        metric      = "Errors"
        dimensions  = { FunctionName = function.function_name }
        # A missing refresh is as bad as a failed one; scale-down may be disabled, and the broker waits for workflows.
        missing = name == "refresh" ? "breaching" : "notBreaching"
      }
    },
    {
      provision = {
        description = "Provisions fail through no fault of the workflows; the log of the broker contains the errors."
        namespace   = "Remuda"
        metric      = "Failed"
        dimensions  = { Pool = var.pool, Command = "provision" }
        missing     = "notBreaching"
      }
      runner-version = {
        description = "GitHub refuses the pool's version of the actions runner soon; remuda status says when and what to do."
        namespace   = "Remuda"
        metric      = "RunnerVersionWarnings"
        dimensions  = { Pool = var.pool, Command = "refresh" }
        missing     = "notBreaching"
      }
      budget = {
        description = "80 % of the pool's budget for this month are spent, or all of it; remuda budget says how much."
        namespace   = "Remuda"
        metric      = "BudgetWarnings"
        dimensions  = { Pool = var.pool, Command = "refresh" }
        missing     = "notBreaching"
      }
      # Nothing else notices it. A refresh that does not run has an alarm.
      throttles = {
        description = "Lambda refuses calls of the broker: too many at a time for the account, or for what is reserved."
        namespace   = "AWS/Lambda"
        metric      = "Throttles"
        dimensions  = { FunctionName = local.has_functions ? aws_lambda_function.this["broker"].function_name : "" }
        missing     = "notBreaching"
      }
      waiting-jobs = {
        description = "Jobs wait for a runner for more than five minutes; remuda status says which, and why."
        namespace   = "Remuda"
        metric      = "JobsWaitingTooLong"
        dimensions  = { Pool = var.pool, Command = "refresh" }
        missing     = "notBreaching"
      }
    },
    {
      for name in ["listener"] : name => {
        description = "The listener of the runner sets is silent; its machine's console has its log."
        namespace   = "Remuda"
        metric      = "Heartbeats"
        dimensions  = { Pool = var.pool, Command = "listen" }
        missing     = "breaching"
      } if local.has_sets
    },
  )
}

# Three bad periods are an alarm, as the next run makes up for a single failure. They may be among twelve, as a command may
# run much less often than every period. In a row where nothing is as bad as a failure.
resource "aws_cloudwatch_metric_alarm" "this" {
  for_each = { for name, alarm in local.alarms : name => alarm if local.has_alarms }

  alarm_name          = "${local.name}-${each.key}"
  alarm_description   = each.value.description
  namespace           = each.value.namespace
  metric_name         = each.value.metric
  dimensions          = each.value.dimensions
  statistic           = "Sum"
  period              = each.key == "listener" ? 60 : 300
  evaluation_periods  = each.value.missing == "breaching" ? 3 : 12
  datapoints_to_alarm = 3
  threshold           = 1
  comparison_operator = each.key == "listener" ? "LessThanThreshold" : "GreaterThanOrEqualToThreshold"
  treat_missing_data  = each.value.missing
  alarm_actions       = [var.alarm_topic.arn]
  ok_actions          = [var.alarm_topic.arn]
}
