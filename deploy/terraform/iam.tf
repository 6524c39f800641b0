# Policies, and the roles of machines and workflows.

locals {
  partition = data.aws_partition.current.partition
  region    = data.aws_region.current.region
  account   = data.aws_caller_identity.current.account_id
}

locals {
  # Policies that exist only under a condition.
  conditions = {
    volume-key       = var.volume_kms_key != null
    image-key        = var.image_kms_key != null
    function-network = length(var.function_subnet_ids) > 0
  }
}

resource "aws_iam_policy" "this" {
  for_each = { for name, holder in local.policies : name => holder if lookup(local.conditions, name, true) }

  name        = "${local.name}-${each.key}"
  description = each.value

  policy = templatefile("${path.module}/policies/${each.key}.json.tftpl", {
    partition      = local.partition
    region         = local.region
    account        = local.account
    pool           = var.pool
    environment    = local.environment
    role_path      = var.role_path
    volume_kms_key = one(var.volume_kms_key[*].arn)
    image_kms_key  = one(var.image_kms_key[*].arn)
    # Without an ARN, all secrets of the pool.
    github_credential = (
      var.github_secret_arn != "" ? var.github_secret_arn :
      "arn:${local.partition}:secretsmanager:${local.region}:${local.account}:secret:remuda/${var.pool}/*"
    )
  })
}

# Machines ------------------------------------------------------------------------------------------------------------

resource "aws_iam_role" "agent" {
  # Fixed names, because policies refer to the role of the agent by name.
  name                 = "${local.name}-agent"
  path                 = var.role_path
  permissions_boundary = var.permissions_boundary == "" ? null : var.permissions_boundary
  tags                 = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy_attachment" "agent" {
  role       = aws_iam_role.agent.name
  policy_arn = aws_iam_policy.this["agent"].arn
}

resource "aws_iam_instance_profile" "agent" {
  name = "${local.name}-agent"
  role = aws_iam_role.agent.name
}

# Workflows -----------------------------------------------------------------------------------------------------------

locals {
  # Keys of conditions begin with the issuer.
  github       = var.oidc_issuer == "" ? "token.actions.githubusercontent.com" : trimsuffix(trimprefix(var.oidc_issuer, "https://"), "/")
  has_workflow = var.oidc_provider != null && length(var.repositories) > 0
  has_refresh  = var.oidc_provider != null && var.refresh_repository != ""
  environments = length(var.environments) > 0 ? [for each in var.environments : "repo:*:environment:${each}"] : ["repo:*"]

  # For provisions, by the broker or in direct mode. With many classes, further queues have policies of their own.
  provision = concat(
    [for each in ["provision", "volume-key", "image-key"] : each if lookup(local.conditions, each, true)],
    [for each in ["provision-queues"] : each if contains(keys(local.policies), each)],
  )
  refresh = concat(["refresh"], [for each in ["refresh-queues"] : each if contains(keys(local.policies), each)])
}

# The subject of GitHub's token is `repo:owner/name:` and a branch, tag, event or environment. Both conditions on it must
# hold. The second one has another operator because a statement has each operator once.
resource "aws_iam_role" "workflow" {
  count = local.has_workflow ? 1 : 0

  name                 = "${local.name}-workflow"
  path                 = var.role_path
  permissions_boundary = var.permissions_boundary == "" ? null : var.permissions_boundary
  tags                 = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Federated = var.oidc_provider.arn }
      Action    = "sts:AssumeRoleWithWebIdentity"
      Condition = {
        StringEquals       = { "${local.github}:aud" = "sts.amazonaws.com" }
        StringLike         = { "${local.github}:sub" = [for each in var.repositories : "repo:${each}:*"] }
        StringLikeIfExists = { "${local.github}:sub" = local.environments }
      }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "workflow" {
  # Without functions there is no broker, and workflows provision in direct mode.
  for_each = toset([for policy in local.has_functions ? ["workflow"] : local.provision : policy if local.has_workflow])

  role       = aws_iam_role.workflow[0].name
  policy_arn = aws_iam_policy.this[each.key].arn
}

# Only reviewed code on this branch may change the pool; other branches may only use it.
resource "aws_iam_role" "refresh" {
  count = local.has_refresh ? 1 : 0

  name                 = "${local.name}-refresh"
  path                 = var.role_path
  permissions_boundary = var.permissions_boundary == "" ? null : var.permissions_boundary
  tags                 = local.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Federated = var.oidc_provider.arn }
      Action    = "sts:AssumeRoleWithWebIdentity"
      Condition = {
        StringEquals = { "${local.github}:aud" = "sts.amazonaws.com" }
        StringLike   = { "${local.github}:sub" = "repo:${var.refresh_repository}:ref:refs/heads/${var.branch}" }
      }
    }]
  })
}

resource "aws_iam_role_policy_attachment" "refresh" {
  for_each = toset([for policy in concat(local.refresh, ["scale-down"]) : policy if local.has_refresh])

  role       = aws_iam_role.refresh[0].name
  policy_arn = aws_iam_policy.this[each.key].arn
}
