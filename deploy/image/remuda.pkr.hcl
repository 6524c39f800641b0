# Image of runner machines: installs packages, agent and runner with the same script that prepares a machine at boot.
# `make image` passes the bundle and its digest. See docs/howto/machine-image.md.

packer {
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.8"
    }
  }
}

variable "agent_bundle" {
  type        = string
  description = "Path of remuda-agent-<version>-<arch>.tar.gz."
}

variable "agent_sha256" {
  type        = string
  description = "SHA-256 digest of the bundle."
}

variable "runner_version" {
  type        = string
  description = "Version of the actions runner, such as 2.336.0. Pools with actions-runner-version: latest replace it if there is a newer one."
}

variable "runner_sha256" {
  type        = string
  description = "SHA-256 digest of the runner's package for the architecture, from the notes of its release."
}

variable "architecture" {
  type        = string
  default     = "x86_64"
  description = "x86_64 or arm64."

  validation {
    condition     = contains(["x86_64", "arm64"], var.architecture)
    error_message = "Set architecture to x86_64 or arm64."
  }
}

variable "region" {
  type        = string
  description = "Region of the image."
}

variable "subnet_id" {
  type        = string
  default     = ""
  description = "Subnet of the building machine. Default is one of the default VPC."
}

variable "source_parameter" {
  type        = string
  default     = ""
  description = "Systems Manager parameter with the id of the base image. Default is Ubuntu 24.04."
}

variable "ssh_username" {
  type        = string
  default     = "ubuntu"
  description = "User of the base image: ubuntu, admin (Debian) or ec2-user (Amazon Linux)."
}

variable "name" {
  type        = string
  default     = "remuda-runner"
  description = "Name of the image, before its time."
}

locals {
  distribution   = { x86_64 = "amd64", arm64 = "arm64" }
  runner         = { x86_64 = "x64", arm64 = "arm64" }
  ubuntu         = "/aws/service/canonical/ubuntu/server/24.04/stable/current/${local.distribution[var.architecture]}/hvm/ebs-gp3/ami-id"
  runner_package = "actions-runner-linux-${local.runner[var.architecture]}-${var.runner_version}.tar.gz"
  runner_url     = "https://github.com/actions/runner/releases/download/v${var.runner_version}/${local.runner_package}"
  uploaded       = "/tmp/remuda-agent.tar.gz"
}

data "amazon-parameterstore" "source" {
  name   = var.source_parameter != "" ? var.source_parameter : local.ubuntu
  region = var.region
}

source "amazon-ebs" "runner" {
  region        = var.region
  subnet_id     = var.subnet_id
  source_ami    = data.amazon-parameterstore.source.value
  instance_type = var.architecture == "arm64" ? "m7g.large" : "m7i.large"
  ssh_username  = var.ssh_username
  ami_name      = "${var.name}-${var.architecture}-${formatdate("YYYYMMDD-hhmmss", timestamp())}"
  imds_support  = "v2.0"

  metadata_options {
    http_endpoint = "enabled"
    http_tokens   = "required"
  }
}

build {
  sources = ["source.amazon-ebs.runner"]

  provisioner "file" {
    source      = var.agent_bundle
    destination = local.uploaded
  }

  provisioner "shell" {
    inline = ["cloud-init status --wait || true"]
  }

  provisioner "shell" {
    script          = "${path.root}/../../src/remuda/adapters/aws/bootstrap.sh"
    execute_command = "sudo env {{ .Vars }} bash {{ .Path }}"
    environment_vars = [
      "purpose=image",
      "opt=/opt/remuda",
      "state=/var/lib/remuda",
      "agent_url_x86_64=file://${local.uploaded}",
      "agent_url_arm64=file://${local.uploaded}",
      "agent_sha256_x86_64=${var.agent_sha256}",
      "agent_sha256_arm64=${var.agent_sha256}",
      "runner_version=${var.runner_version}",
      "runner_url_x64=${local.runner_url}",
      "runner_url_arm64=${local.runner_url}",
      "runner_sha256_x64=${var.runner_sha256}",
      "runner_sha256_arm64=${var.runner_sha256}",
      "job_image_url=",
      "job_image_sha256=",
    ]
  }

  # Install the tools of your jobs here.

  provisioner "shell" {
    inline = ["sudo rm -f ${local.uploaded}", "sudo cloud-init clean --logs"]
  }
}
