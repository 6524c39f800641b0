# The listener of runner sets, on an instance of its own that an Auto Scaling group replaces if it fails.

locals {
  has_sets = var.runner_sets != null
  # Also if the list of sets is empty: the listener removes the last set from GitHub.
  has_listener = local.has_functions && local.has_sets && var.listener == "instance"
  listener     = "${local.name}-listener"
}

resource "aws_iam_role" "listener" {
  count = local.has_listener ? 1 : 0

  name                 = local.listener
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

resource "aws_iam_role_policy_attachment" "listener" {
  for_each = toset([for policy in concat(local.provision, ["listener"]) : policy if local.has_listener])

  role       = aws_iam_role.listener[0].name
  policy_arn = aws_iam_policy.this[each.key].arn
}

resource "aws_iam_instance_profile" "listener" {
  count = local.has_listener ? 1 : 0

  name = local.listener
  role = aws_iam_role.listener[0].name
}

# Template and instance do not have the tag of the pool: provision may launch with tagged templates, and refresh ends
# tagged instances without a record.
resource "aws_launch_template" "listener" {
  count = local.has_listener ? 1 : 0

  name                   = local.listener
  update_default_version = true
  image_id               = var.listener_ami
  instance_type          = var.listener_instance_type
  vpc_security_group_ids = var.security_group_ids

  iam_instance_profile {
    name = aws_iam_instance_profile.listener[0].name
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/sda1"

    ebs {
      encrypted   = true
      volume_type = "gp3"
      volume_size = 8
    }
  }

  tag_specifications {
    resource_type = "volume"
    tags          = { Name = local.listener }
  }

  user_data = base64encode(templatefile("${path.module}/listener.sh.tftpl", {
    pool           = var.pool
    agent_url      = var.agent_url
    agent_sha256   = var.agent_sha256
    github_token   = local.variables["REMUDA_GITHUB_TOKEN"]
    github_app_key = local.variables["REMUDA_GITHUB_APP_KEY"]
    settings       = aws_ssm_parameter.settings[0].name
    group          = local.listener
    stack          = ""
  }))
}

resource "aws_autoscaling_group" "listener" {
  count = local.has_listener ? 1 : 0

  name                  = local.listener
  min_size              = 1
  max_size              = 2
  desired_capacity      = 1
  vpc_zone_identifier   = var.subnet_ids
  health_check_type     = "EC2"
  max_instance_lifetime = 2592000

  launch_template {
    id      = aws_launch_template.listener[0].id
    version = aws_launch_template.listener[0].latest_version
  }

  instance_maintenance_policy {
    min_healthy_percentage = 100
    max_healthy_percentage = 200
  }

  # The new instance starts as a standby, before the old one ends: a lease lets one of them serve the sets.
  instance_refresh {
    strategy = "Rolling"

    preferences {
      min_healthy_percentage = 100
      max_healthy_percentage = 200
      instance_warmup        = 120
    }
  }

  tag {
    key                 = "Name"
    value               = local.listener
    propagate_at_launch = true
  }

  # An instance without its permissions fails in its first minutes.
  depends_on = [aws_iam_role_policy_attachment.listener]
}

# The group keeps the old instance until the new listener has completed this hook, which it does when it works.
resource "aws_autoscaling_lifecycle_hook" "listener" {
  count = local.has_listener ? 1 : 0

  name                   = "listener-ready"
  autoscaling_group_name = aws_autoscaling_group.listener[0].name
  lifecycle_transition   = "autoscaling:EC2_INSTANCE_LAUNCHING"
  default_result         = "ABANDON"
  heartbeat_timeout      = 600
}
