output "table_name" {
  description = "Name of the table."
  value       = aws_dynamodb_table.this.name
}

output "agent_profile_name" {
  description = "Value for iam-instance-profile."
  value       = aws_iam_instance_profile.agent.name
}

output "workflow_policy_arn" {
  description = "Policy for your own role."
  value       = aws_iam_policy.this["workflow"].arn
}

output "provision_policy_arn" {
  description = "Policy for your own role in direct mode."
  value       = aws_iam_policy.this["provision"].arn
}

output "refresh_policy_arn" {
  description = "Policy for your own role."
  value       = aws_iam_policy.this["refresh"].arn
}

output "volume_key_policy_arn" {
  description = "Policy for your own role."
  value       = one([for name, policy in aws_iam_policy.this : policy.arn if name == "volume-key"])
}

output "workflow_role_arn" {
  description = "Role for workflows."
  value       = one(aws_iam_role.workflow[*].arn)
}

output "refresh_role_arn" {
  description = "Role for a scheduled workflow."
  value       = one(aws_iam_role.refresh[*].arn)
}

output "scale_down_policy_arn" {
  description = "Policy for your own role."
  value       = aws_iam_policy.this["scale-down"].arn
}

output "listener_policy_arn" {
  description = "Policy for your own role, with that of provision."
  value       = aws_iam_policy.this["listener"].arn
}

output "listener_group_name" {
  description = "Auto Scaling group of the listener."
  value       = one(aws_autoscaling_group.listener[*].name)
}

output "refresh_function_name" {
  description = "Runs refresh every five minutes."
  value       = one([for name, function in aws_lambda_function.this : function.function_name if name == "refresh"])
}

output "scale_down_function_name" {
  description = "Runs scale-down every five minutes."
  value       = one([for name, function in aws_lambda_function.this : function.function_name if name == "scale-down"])
}

output "broker_name" {
  description = "Function for workflows."
  value       = one([for name, function in aws_lambda_function.this : function.function_name if name == "broker"])
}

output "broker_url" {
  description = "Value for broker-url."
  value       = one(aws_lambda_function_url.broker[*].function_url)
}
