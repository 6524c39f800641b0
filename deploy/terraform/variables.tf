# Variables of the stack. Those of the settings are in generated.tf.
#
# Optional resources are objects with an `arn`, so that the plan that creates them knows whether they exist. They take the
# resource itself: `alarm_topic = aws_sns_topic.alarms`.

variable "pool" {
  description = "Name of the pool."
  type        = string
  default     = "default"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]{1,20}$", var.pool))
    error_message = "pool must have 1 to 20 lower-case letters, digits and hyphens."
  }
}

variable "oidc_provider" {
  description = "GitHub's OIDC provider in IAM. If null, no roles for workflows are created."
  type        = object({ arn = string })
  default     = null
}

variable "repositories" {
  description = "Repositories whose workflows may use the pool: owner/name, owner/* for all repositories of an organisation, or owner@id/name@id and owner@id/* for immutable subject claims."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    # No wildcard except for all repositories of an owner, because the trust policy uses StringLike.
    condition     = alltrue([for each in var.repositories : can(regex("^[A-Za-z0-9-]+(@[0-9]+)?/([A-Za-z0-9_.-]+(@[0-9]+)?|\\*)$", each))])
    error_message = "repositories must have the form owner/name, owner/*, owner@id/name@id or owner@id/*."
  }
}

variable "environments" {
  description = "GitHub environments whose jobs may use the pool. If empty, all jobs of the repositories may."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for each in var.environments : can(regex("^[^*?:,]+$", each))])
    error_message = "environments must be names without *, ?, colon and comma."
  }
}

variable "refresh_repository" {
  description = "Repository (owner/name, owner@id/name@id) whose workflows may run refresh and scale-down."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9-]+(@[0-9]+)?/[A-Za-z0-9_.-]+(@[0-9]+)?)?$", var.refresh_repository))
    error_message = "refresh_repository must have the form owner/name or owner@id/name@id."
  }
}

variable "branch" {
  description = "Branch of refresh_repository whose workflows may run refresh and scale-down."
  type        = string
  default     = "main"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_./-]+$", var.branch))
    error_message = "branch must be the name of a branch, without wildcards."
  }
}

variable "code" {
  description = "Code of the functions: filename of remuda-lambda-<version>-<arch>.zip, or its s3_bucket and s3_key. If null, no functions and schedules are created."
  type = object({
    filename  = optional(string)
    s3_bucket = optional(string)
    s3_key    = optional(string)
  })
  default = null

  validation {
    condition     = var.code == null ? true : (var.code.filename != null) != (var.code.s3_bucket != null && var.code.s3_key != null)
    error_message = "code must have either filename, or s3_bucket and s3_key."
  }

  validation {
    condition     = var.code == null || (var.github_secret_arn != "" && var.github_scope != "")
    error_message = "The functions need a GitHub credential and the scope of the runners. Set github_secret_arn and github_scope."
  }
}

variable "architecture" {
  description = "Architecture that the code was built for."
  type        = string
  default     = "x86_64"
  nullable    = false

  validation {
    condition     = contains(["x86_64", "arm64"], var.architecture)
    error_message = "architecture must be x86_64 or arm64."
  }
}

variable "runtime" {
  description = "Python version that the code was built for."
  type        = string
  default     = "python3.13"
  nullable    = false

  validation {
    condition     = contains(["python3.11", "python3.12", "python3.13"], var.runtime)
    error_message = "runtime must be python3.11, python3.12 or python3.13."
  }
}

variable "github_secret_arn" {
  description = "ARN of the secret with the GitHub token, or with the private key of the GitHub App if github_app_id is set."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^(arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+)?$", var.github_secret_arn))
    error_message = "github_secret_arn must be the ARN of a secret in Secrets Manager."
  }
}

variable "scale_down" {
  description = "Whether scale-down runs on its schedule."
  type        = bool
  default     = true
  nullable    = false
}

variable "alarm_topic" {
  description = "SNS topic for alarms: functions that fail repeatedly, a runner version that GitHub refuses soon, a silent listener, and jobs of runner sets that wait too long. If null, no alarms are created."
  type        = object({ arn = string })
  default     = null
}

variable "function_subnet_ids" {
  description = "Subnets of the functions, in the VPC of security_group_ids and with a route to the internet through a NAT: GitHub then sees the addresses of the NAT. If empty, the functions are outside of any VPC, and their addresses change."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(var.function_subnet_ids) == 0 || length(var.security_group_ids) > 0
    error_message = "function_subnet_ids requires security_group_ids."
  }
}

variable "image_kms_key" {
  description = "KMS key of encrypted images, if it is not that of the volumes: a key of the account that shares the images, for example."
  type        = object({ arn = string })
  default     = null
}

variable "reserve_concurrency" {
  description = "Whether each scheduled function reserves one of the account's concurrent executions."
  type        = bool
  default     = false
  nullable    = false
}

variable "function_url" {
  description = "Whether the broker has a public URL, so that workflows need no AWS credentials. It requires the same OIDC token of the workflow as without URL."
  type        = bool
  default     = false
  nullable    = false
}

variable "broker_concurrency" {
  description = "Maximum number of concurrent requests to the broker, reserved from the account's concurrent executions. Each waiting workflow needs two. If null, only the limit of the account applies."
  type        = number
  default     = null

  validation {
    condition     = can(regex("^([1-9][0-9]{0,4})?$", var.broker_concurrency == null ? "" : tostring(var.broker_concurrency)))
    error_message = "broker_concurrency must be an integer from 1 to 99999."
  }
}

variable "listener" {
  description = "Where the listener of runner_sets runs: on an instance of its own, which exists if runner_sets is set (also as []), or none in this module."
  type        = string
  default     = "instance"
  nullable    = false

  validation {
    condition     = contains(["instance", "none"], var.listener)
    error_message = "listener must be instance or none."
  }

  validation {
    condition = (
      var.code == null || var.runner_sets == null || var.listener != "instance" ? true :
      var.agent_url != "" && var.agent_sha256 != "" && length(var.subnet_ids) > 0 && length(var.security_group_ids) > 0
    )
    error_message = "The listener of runner_sets requires agent_url, agent_sha256, subnet_ids and security_group_ids, or listener = \"none\"."
  }
}

variable "listener_instance_type" {
  description = "Instance type of the listener."
  type        = string
  default     = "t3.micro"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.listener_instance_type))
    error_message = "listener_instance_type must be an instance type."
  }
}

variable "listener_ami" {
  description = "Image of the listener: Ubuntu 24.04 for the architecture of listener_instance_type, as an id or as resolve:ssm:NAME."
  type        = string
  default     = "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
  nullable    = false

  validation {
    condition     = can(regex("^(ami-[0-9a-f]+|resolve:ssm:.+)$", var.listener_ami))
    error_message = "listener_ami must be the id of an image, or resolve:ssm: and the name of a parameter."
  }
}

variable "permissions_boundary" {
  description = "ARN of the policy that limits every role of the pool, as organizations require it."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^(arn:[a-z-]+:iam::([0-9]{12}|aws):policy/[!-~]{1,512})?$", var.permissions_boundary))
    error_message = "permissions_boundary must be the ARN of an IAM policy."
  }
}

variable "role_path" {
  description = "Path of the roles of the pool, such as /ci/."
  type        = string
  default     = "/"
  nullable    = false

  validation {
    condition     = can(regex("^/([A-Za-z0-9+=,.@_-]+/){0,8}$", var.role_path))
    error_message = "role_path must begin and end with a slash, such as /ci/."
  }
}
