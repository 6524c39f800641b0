# A pool with functions, roles for workflows, and alarms. The artefacts of a release are in the folder `dist`.

provider "aws" {}

data "aws_caller_identity" "current" {}
data "aws_region" "current" {}

# Once per account. If it exists: `data "aws_iam_openid_connect_provider"`.
resource "aws_iam_openid_connect_provider" "github" {
  url            = "https://token.actions.githubusercontent.com"
  client_id_list = ["sts.amazonaws.com"]
}

# Its value is set outside of Terraform, so that it is not in the state:
# aws secretsmanager put-secret-value --secret-id remuda/ci/github --secret-string file://token.txt
resource "aws_secretsmanager_secret" "github" {
  name = "remuda/ci/github"
}

# Without a key: CloudWatch may not use the key `alias/aws/sns`, so its alarms would not arrive. A key of your own must
# permit `cloudwatch.amazonaws.com` the actions `kms:Decrypt` and `kms:GenerateDataKey*`.
resource "aws_sns_topic" "alarms" {
  name = "remuda-ci"
}

# The role of the machines may read only `agent/` of the bucket with this name.
resource "aws_s3_bucket" "artefacts" {
  bucket        = "remuda-ci-${data.aws_caller_identity.current.account_id}-${data.aws_region.current.region}"
  force_destroy = true
}

resource "aws_s3_bucket_public_access_block" "artefacts" {
  bucket = aws_s3_bucket.artefacts.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

locals {
  agent = "remuda-agent-${var.release}-x86_64.tar.gz"
}

resource "aws_s3_object" "agent" {
  bucket      = aws_s3_bucket.artefacts.id
  key         = "agent/${local.agent}"
  source      = "${var.dist}/${local.agent}"
  source_hash = filesha256("${var.dist}/${local.agent}")
}

module "remuda" {
  source = "../.."

  pool              = "ci"
  github_scope      = var.scope
  github_secret_arn = aws_secretsmanager_secret.github.arn
  code              = { filename = "${var.dist}/remuda-lambda-${var.release}-x86_64.zip" }
  alarm_topic       = aws_sns_topic.alarms

  # Workflows
  oidc_provider = aws_iam_openid_connect_provider.github
  repositories  = var.repositories

  # Machines
  ami                = "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
  subnet_ids         = var.subnet_ids
  security_group_ids = var.security_group_ids
  agent_url          = "s3://${aws_s3_object.agent.bucket}/${aws_s3_object.agent.key}"
  agent_sha256       = filesha256("${var.dist}/${local.agent}")
  max_instances      = 20
  idle_time_sec      = 600

  idle_config = [
    { cron = "* * 9-17 * * 1-5", timeZone = "Europe/Berlin", idleCount = 2 },
  ]
}

output "workflow_role_arn" {
  description = "For role-to-assume of aws-actions/configure-aws-credentials."
  value       = module.remuda.workflow_role_arn
}
