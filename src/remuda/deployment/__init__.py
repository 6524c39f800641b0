"""Resources of a pool in an AWS account: IAM policies and the CloudFormation template."""
