variable "scope" {
  description = "Organization or repository that runners register in: acme, or acme/app."
  type        = string
}

variable "repositories" {
  description = "Repositories whose workflows may use the pool: acme/app, or acme/* for all."
  type        = list(string)
}

variable "dist" {
  description = "Folder with the artefacts of the release."
  type        = string
}

variable "release" {
  description = "Version of the release, such as 1.0.0."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the machines, with a route to GitHub and AWS."
  type        = list(string)
}

variable "security_group_ids" {
  description = "Security groups of the machines. They need no inbound rule."
  type        = list(string)
}
